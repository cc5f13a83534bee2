// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --numerics fast --isa avx2 --threads 2
// 1111 lines, sha256 f3774c95ba7ba5eb409c782d93d155f7dfe9f91bd67ba21a5679f27fbed9df67
                %137:10 = scf.for %126 = %c0 to %c9 step %c1 iter_args(%127 = %116, %128 = %117, %129 = %118, %130 = %119, %131 = %120, %132 = %121, %133 = %122, %134 = %123, %135 = %124, %136 = %125) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %138 = arith.muli %126, %c7 : index
                  %139 = vector.load %2[%126, %105] : memref<2x16xf32>, vector<8xf32>
                  %140 = vector.load %3[%126, %105] : memref<2x16xf32>, vector<8xf32>
                  %141 = vector.load %2[%126, %107] : memref<2x16xf32>, vector<8xf32>
                  %142 = vector.load %3[%126, %107] : memref<2x16xf32>, vector<8xf32>
                  %143 = arith.addi %104, %c1 : index
                  %144 = arith.addi %104, %c9 : index
                  %145 = arith.addi %104, %c15 : index
                  %146 = arith.addi %104, %c4 : index
                  %147 = arith.divui %19, %c10 : index
                  %148 = arith.addi %147, %126 : index
                  %149 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %150 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %151 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %152 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %153 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %154 = arith.muli %148, %c7 : index
                  %155 = vector.load %1[%138, %105] : memref<16x16xi32>, vector<8xi32>
                  %156 = vector.load %1[%138, %107] : memref<16x16xi32>, vector<8xi32>
                  %157 = vector.bitcast %155 : vector<8xi32> to vector<32xi8>
                  %158 = vector.bitcast %156 : vector<8xi32> to vector<32xi8>
                  %159 = memref.load %m0[%104, %154] : memref<9x16xi32>
                  %160 = vector.broadcast %159 : i32 to vector<8xi32>
                  %161 = vector.bitcast %160 : vector<8xi32> to vector<32xi8>
                  %162 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%157, %161) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %163 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%158, %161) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %164 = memref.load %m0[%143, %154] : memref<9x16xi32>
                  %165 = vector.broadcast %164 : i32 to vector<8xi32>
                  %166 = vector.bitcast %165 : vector<8xi32> to vector<32xi8>
                  %167 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%157, %166) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %168 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%158, %166) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %169 = memref.load %m0[%144, %154] : memref<9x16xi32>
                  %170 = vector.broadcast %169 : i32 to vector<8xi32>
                  %171 = vector.bitcast %170 : vector<8xi32> to vector<32xi8>
                  %172 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%157, %171) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %173 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%158, %171) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %174 = memref.load %m0[%145, %154] : memref<9x16xi32>
                  %175 = vector.broadcast %174 : i32 to vector<8xi32>
                  %176 = vector.bitcast %175 : vector<8xi32> to vector<32xi8>
// 426 lines more
                  %603 = vector.broadcast %602 : f32 to vector<8xf32>
                  %604 = math.fma %601, %603, %135 : vector<8xf32>
                  %605 = memref.load %m2[%146, %148] : memref<9x2xf32>
                  %606 = vector.broadcast %605 : f32 to vector<8xf32>
                  %607 = math.fma %140, %606, %604 : vector<8xf32>
                  %608 = arith.mulf %535, %141 : vector<8xf32>
                  %609 = llvm.call_intrinsic "llvm.arithmetic.fence"(%608) : (vector<8xf32>) -> vector<8xf32>
                  %610 = memref.load %m1[%146, %148] : memref<9x2xf32>
                  %611 = vector.broadcast %610 : f32 to vector<8xf32>
                  %612 = math.fma %609, %611, %136 : vector<8xf32>
                  %613 = memref.load %m2[%146, %148] : memref<9x2xf32>
                  %614 = vector.broadcast %613 : f32 to vector<8xf32>
                  %615 = math.fma %142, %614, %612 : vector<8xf32>
                  scf.yield %543, %551, %559, %567, %575, %583, %591, %599, %607, %615 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }
