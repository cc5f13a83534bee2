// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --isa amx --threads 2
// 318 lines, sha256 0f3a2a80a567f8b13667731969d53e69dafc4e0dd069b43bb4cc010c575d1970
              scf.for %41 = %c0 to %c1 step %c1 {
                %43 = arith.divui %26, %c6 : index
                %44 = arith.addi %43, %41 : index
                %45 = arith.muli %32, %c11 : index
                %46 = vector.load %m2[%32, %44, %c0] : memref<1x2x320xi8>, vector<32xi8>
                %47 = vector.bitcast %46 : vector<32xi8> to vector<16xf16>
                %48 = arith.extf %47 : vector<16xf16> to vector<16xf32>
                %49 = vector.load %m2[%32, %44, %c6] : memref<1x2x320xi8>, vector<32xi8>
                %50 = vector.bitcast %49 : vector<32xi8> to vector<16xf16>
                %51 = arith.extf %50 : vector<16xf16> to vector<16xf32>
                vector.store %48, %2[%41, %45] : memref<1x16xf32>, vector<16xf32>
                vector.store %51, %3[%41, %45] : memref<1x16xf32>, vector<16xf32>
                %52 = vector.load %m2[%32, %44, %c5] : memref<1x2x320xi8>, vector<64xi8>
                %53 = vector.bitcast %52 : vector<64xi8> to vector<16xi32>
                %54 = vector.bitcast %53 : vector<16xi32> to vector<64xi8>
                %55 = llvm.call_intrinsic "llvm.x86.avx512.pmultishift.qb.512"(%c12, %54) : (vector<64xi8>, vector<64xi8>) -> vector<64xi8>
                %56 = vector.bitcast %55 : vector<64xi8> to vector<16xi32>
                %57 = vector.bitcast %56 : vector<16xi32> to vector<32xi16>
                %58 = llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"(%c13, %57) : (vector<32xi16>, vector<32xi16>) -> vector<32xi16>
                %59 = vector.bitcast %58 : vector<32xi16> to vector<16xi32>
                vector.store %59, %1[%c0, %41, %32, %c0, %c0] : memref<1x1x1x16x16xi32>, vector<16xi32>
                %60 = vector.bitcast %53 : vector<16xi32> to vector<64xi8>
                %61 = llvm.call_intrinsic "llvm.x86.avx512.pmultishift.qb.512"(%c14, %60) : (vector<64xi8>, vector<64xi8>) -> vector<64xi8>
                %62 = vector.bitcast %61 : vector<64xi8> to vector<16xi32>
                %63 = vector.bitcast %62 : vector<16xi32> to vector<32xi16>
                %64 = llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"(%c13, %63) : (vector<32xi16>, vector<32xi16>) -> vector<32xi16>
                %65 = vector.bitcast %64 : vector<32xi16> to vector<16xi32>
                vector.store %65, %1[%c0, %41, %32, %c1, %c0] : memref<1x1x1x16x16xi32>, vector<16xi32>
                %66 = vector.bitcast %53 : vector<16xi32> to vector<64xi8>
                %67 = llvm.call_intrinsic "llvm.x86.avx512.pmultishift.qb.512"(%c15, %66) : (vector<64xi8>, vector<64xi8>) -> vector<64xi8>
                %68 = vector.bitcast %67 : vector<64xi8> to vector<16xi32>
                %69 = vector.bitcast %68 : vector<16xi32> to vector<32xi16>
                %70 = llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"(%c13, %69) : (vector<32xi16>, vector<32xi16>) -> vector<32xi16>
                %71 = vector.bitcast %70 : vector<32xi16> to vector<16xi32>
                vector.store %71, %1[%c0, %41, %32, %c16, %c0] : memref<1x1x1x16x16xi32>, vector<16xi32>
                %72 = vector.bitcast %53 : vector<16xi32> to vector<64xi8>
                %73 = llvm.call_intrinsic "llvm.x86.avx512.pmultishift.qb.512"(%c17, %72) : (vector<64xi8>, vector<64xi8>) -> vector<64xi8>
                %74 = vector.bitcast %73 : vector<64xi8> to vector<16xi32>
                %75 = vector.bitcast %74 : vector<16xi32> to vector<32xi16>
                %76 = llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"(%c13, %75) : (vector<32xi16>, vector<32xi16>) -> vector<32xi16>
// 78 lines more
                %144 = vector.bitcast %131 : vector<16xi32> to vector<64xi8>
                %145 = llvm.call_intrinsic "llvm.x86.avx512.pmultishift.qb.512"(%c15, %144) : (vector<64xi8>, vector<64xi8>) -> vector<64xi8>
                %146 = vector.bitcast %145 : vector<64xi8> to vector<16xi32>
                %147 = vector.bitcast %146 : vector<16xi32> to vector<32xi16>
                %148 = llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"(%c13, %147) : (vector<32xi16>, vector<32xi16>) -> vector<32xi16>
                %149 = vector.bitcast %148 : vector<32xi16> to vector<16xi32>
                vector.store %149, %1[%c0, %41, %32, %c27, %c0] : memref<1x1x1x16x16xi32>, vector<16xi32>
                %150 = vector.bitcast %131 : vector<16xi32> to vector<64xi8>
                %151 = llvm.call_intrinsic "llvm.x86.avx512.pmultishift.qb.512"(%c17, %150) : (vector<64xi8>, vector<64xi8>) -> vector<64xi8>
                %152 = vector.bitcast %151 : vector<64xi8> to vector<16xi32>
                %153 = vector.bitcast %152 : vector<16xi32> to vector<32xi16>
                %154 = llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"(%c13, %153) : (vector<32xi16>, vector<32xi16>) -> vector<32xi16>
                %155 = vector.bitcast %154 : vector<32xi16> to vector<16xi32>
                vector.store %155, %1[%c0, %41, %32, %c28, %c0] : memref<1x1x1x16x16xi32>, vector<16xi32>
              }
