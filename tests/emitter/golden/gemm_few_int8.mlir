// castiron emit --kernel gemm_few --shape 16x64 --codec q5_0 --tokens 2 --numerics fast --isa avx2 --threads 2
// 286 lines, sha256 29d9d0ca5111ed9b4336f623b6b8bd839f674c964fe8d162df5fd0eccdd721a7
            %19:2 = scf.for %16 = %c0 to %c2 step %c1 iter_args(%17 = %c5, %18 = %c5) -> (vector<8xf32>, vector<8xf32>) {
              %20 = arith.addi %16, %c6 : index
              %21 = arith.divui %20, %c2 : index
              %22 = arith.remui %20, %c2 : index
              %23 = arith.addi %10, %21 : index
              memref.prefetch %m3[%23, %22, %c0], read, locality<3>, data : memref<1x2x352xi8>
              %24 = arith.addi %10, %21 : index
              memref.prefetch %m3[%24, %22, %c7], read, locality<3>, data : memref<1x2x352xi8>
              %25 = arith.addi %10, %21 : index
              memref.prefetch %m3[%25, %22, %c8], read, locality<3>, data : memref<1x2x352xi8>
              %26 = arith.addi %10, %21 : index
              memref.prefetch %m3[%26, %22, %c9], read, locality<3>, data : memref<1x2x352xi8>
              %27 = arith.addi %10, %21 : index
              memref.prefetch %m3[%27, %22, %c10], read, locality<3>, data : memref<1x2x352xi8>
              %28 = arith.addi %10, %21 : index
              memref.prefetch %m3[%28, %22, %c11], read, locality<3>, data : memref<1x2x352xi8>
              %29 = arith.muli %9, %c3 : index
              %30 = vector.load %m3[%10, %16, %29] : memref<1x2x352xi8>, vector<16xi8>
              %31 = vector.bitcast %30 : vector<16xi8> to vector<8xf16>
              %32 = arith.extf %31 : vector<8xf16> to vector<8xf32>
              %33 = arith.mulf %32, %c12 : vector<8xf32>
              %34 = arith.addi %14, %c1 : index
              %35 = memref.load %m2[%14, %16] : memref<2x2xi32>
              %36 = arith.muli %35, %c14 : i32
              %37 = memref.load %m2[%34, %16] : memref<2x2xi32>
              %38 = arith.muli %37, %c14 : i32
              %39 = vector.broadcast %36 : i32 to vector<8xi32>
              %40 = vector.broadcast %38 : i32 to vector<8xi32>
              %41 = arith.muli %16, %c4 : index
              %42 = arith.muli %9, %c15 : index
              %43 = arith.addi %c15, %42 : index
              %44 = vector.load %m3[%10, %16, %43] : memref<1x2x352xi8>, vector<32xi8>
              %45 = vector.bitcast %44 : vector<32xi8> to vector<8xi32>
              %46 = arith.andi %45, %c16 : vector<8xi32>
              %47 = arith.muli %9, %c15 : index
              %48 = arith.addi %c17, %47 : index
              %49 = vector.load %m3[%10, %16, %48] : memref<1x2x352xi8>, vector<32xi8>
              %50 = vector.bitcast %49 : vector<32xi8> to vector<8xi32>
              %51 = arith.shli %50, %c18 : vector<8xi32>
              %52 = arith.andi %51, %c19 : vector<8xi32>
// 147 lines more
              %200 = arith.addi %180, %199 : vector<16xi16>
              %201 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%200, %c25) : (vector<16xi16>, vector<16xi16>) -> vector<8xi32>
              %202 = arith.addi %123, %201 : vector<8xi32>
              %203 = arith.sitofp %194 : vector<8xi32> to vector<8xf32>
              %204 = arith.sitofp %202 : vector<8xi32> to vector<8xf32>
              %205 = arith.mulf %203, %32 : vector<8xf32>
              %206 = memref.load %m1[%14, %16] : memref<2x2xf32>
              %207 = vector.broadcast %206 : f32 to vector<8xf32>
              %208 = math.fma %205, %207, %17 : vector<8xf32>
              %209 = arith.mulf %204, %32 : vector<8xf32>
              %210 = memref.load %m1[%34, %16] : memref<2x2xf32>
              %211 = vector.broadcast %210 : f32 to vector<8xf32>
              %212 = math.fma %209, %211, %18 : vector<8xf32>
              scf.yield %208, %212 : vector<8xf32>, vector<8xf32>
            }
